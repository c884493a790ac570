"""What an application holds: a loaded model and, built on it, sessions."""
