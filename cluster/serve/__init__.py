"""HTTP and text: the OpenAI dialect, chat templates, one request from body to answer."""
