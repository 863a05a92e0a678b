"""Importing this takes longer than a process may."""

import time

time.sleep(600)
