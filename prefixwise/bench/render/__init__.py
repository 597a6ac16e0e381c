"""Render: one report document, as Markdown, as HTML and on a terminal."""
