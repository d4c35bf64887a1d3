"""The built-in models: the module NAME registers ``model=NAME``, and imports torch or transformers when it builds."""
