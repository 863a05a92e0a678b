"""Texts behind a server: what generates them, and the routes of Triton's generate extension."""
