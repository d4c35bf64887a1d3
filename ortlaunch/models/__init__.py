"""Built-in models. Each module builds one family; torch and transformers are imported when a model is built."""
