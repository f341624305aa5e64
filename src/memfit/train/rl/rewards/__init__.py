"""Rewards of sampled answers: functions that ship, functions of a user's file, their process."""
