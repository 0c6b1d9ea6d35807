"""The HTTP gateway: OpenAI's API over the queue. `app.build` makes the application, `server` runs it."""
