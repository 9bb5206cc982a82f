"""Records -> what people read: leaderboard.md, report.html, card.md. Pure: files in, text out."""

from __future__ import annotations

from finalbench.report.render import render, render_page

__all__ = ["render", "render_page"]
