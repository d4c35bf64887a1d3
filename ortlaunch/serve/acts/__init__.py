"""What a child of the service does for a Unix user (`ortlaunch.serve.act`), with the launchers and verbs that exist."""
