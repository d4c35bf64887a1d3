"""The data sources: the module NAME is ``data=NAME``. None imports torch or NumPy before it is opened."""
