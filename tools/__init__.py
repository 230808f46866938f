"""What makes pages: the site, the reference, figures, and the texts for agents in the wheel."""
