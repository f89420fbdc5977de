"""Small things that every level may use: errors, logging, hardware facts."""
