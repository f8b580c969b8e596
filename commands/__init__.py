"""One file a verb of the command line, the options they share, and the table of verbs."""
