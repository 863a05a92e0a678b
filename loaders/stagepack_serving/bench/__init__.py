"""Clients that measure a server from outside: closed and open loops, over REST and OpenAI's API. Needs no torch."""
