"""`python -m batchinfer`: the command line."""

from batchinfer.cli.main import main

main()
