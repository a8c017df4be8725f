"""The quality study: what each codec does to the perplexity of a fine-tuned model, at what rate."""
