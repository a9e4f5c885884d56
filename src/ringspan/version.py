"""The release of ringspan."""

__version__ = "0.1.0"
