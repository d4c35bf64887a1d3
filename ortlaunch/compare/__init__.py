"""`ortlaunch compare`: what runs achieved, side by side, read back from MLflow."""
