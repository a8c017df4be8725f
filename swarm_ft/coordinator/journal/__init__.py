"""Durable storage of the coordinator; the only `import sqlite3`."""
