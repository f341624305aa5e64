"""The files of a request and of a run's folder."""
