"""Plug-ins to copy from: `[[hooks.request]] use = "examples.hooks.system_prompt:SystemPrompt"` in the configuration."""
