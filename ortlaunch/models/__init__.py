"""The models by name (`registry`), the built-in models (`built_in/`), and the code that models share."""
