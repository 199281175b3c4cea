"""How the miniature checkpoint was made: its data, its training, its checks; see README.md."""
