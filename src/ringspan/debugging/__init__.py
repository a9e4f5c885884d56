"""Settings for diagnosis, from environment variables."""
