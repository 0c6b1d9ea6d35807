"""OpenAI's formats, without I/O: requests into bodies of jobs, results and events into answers, chunks and errors."""
