"""From logits to ids and from ids to text: sampling, grammars, detokenisation."""
