"""What people read: rows as tables in the terminal and in Markdown, with figures in HTML."""
