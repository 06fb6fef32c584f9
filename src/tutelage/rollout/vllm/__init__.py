"""Generation by vLLM: in this process, in processes of its own, or as a server."""
