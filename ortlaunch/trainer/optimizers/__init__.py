"""The optimizers: the module NAME is ``optimizer=NAME``. None imports torch before it builds."""
