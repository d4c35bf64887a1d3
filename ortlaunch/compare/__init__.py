"""`ortlaunch compare`: reads runs back from MLflow and compares their results."""
