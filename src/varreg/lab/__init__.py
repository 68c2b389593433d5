"""Does it help? Data, models, training runs and comparisons. The core never imports this."""
