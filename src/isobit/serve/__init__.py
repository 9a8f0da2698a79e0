"""HTTP: the OpenAI-compatible routes over the engine.

`app.create_app` makes the application, `server.run` binds a port and runs it until a signal.
"""
