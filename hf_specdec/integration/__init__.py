"""The only code that knows transformers' internals; nothing else imports it."""

from .dispatch import SpecGenerate, enable, install, is_installed, uninstall

__all__ = ["SpecGenerate", "enable", "install", "is_installed", "uninstall"]
