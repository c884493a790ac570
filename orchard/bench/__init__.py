"""Benchmarks that run peers side by side: `orchard bench engine`. The lightest of Orchard's imports only; see `engine`."""
