"""Drawing tokens at random from whole rows of logits."""
