"""The parts around the model: data, tokenizer, optimizer, schedule, checkpoint, metrics."""
