"""Reports: measured rows as tables in the terminal, in Markdown and in HTML. Imported after measuring."""
