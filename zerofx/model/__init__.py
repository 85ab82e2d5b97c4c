"""Facts about a model, without a tensor of any rank."""
