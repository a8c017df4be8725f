"""`python -m swarm_ft` is `swarm-ft`."""

from swarm_ft.cli.main import main

if __name__ == "__main__":
    main()
