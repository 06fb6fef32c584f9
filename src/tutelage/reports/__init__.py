"""What a run looks like: logs, samples, figures, the HTML report, the live display. Import from the modules."""
