"""The command line: commands (`main`), and how things are shown (`display`, `texts`). The only room that prints."""
