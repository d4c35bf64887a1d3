"""The learning-rate schedules: the module NAME is ``scheduler=NAME``."""
