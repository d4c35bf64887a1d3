"""The service `ortlaunch serve`: a page and an API in which several people submit, follow and compare runs."""
