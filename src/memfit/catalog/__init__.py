"""Devices and models as rows with units, source and date."""
