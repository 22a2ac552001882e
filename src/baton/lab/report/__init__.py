"""Reports: from records and decision logs to pages, traces and explanations. Pure: data in, text out."""
