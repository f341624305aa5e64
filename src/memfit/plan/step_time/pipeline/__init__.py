"""Seconds of pipeline schedules."""
