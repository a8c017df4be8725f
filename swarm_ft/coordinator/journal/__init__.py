"""What outlives the coordinator's process; the only `import sqlite3`."""
