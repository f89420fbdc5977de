"""The one exception that stands for a mistake its reader can fix."""


class UserError(Exception):
    """Wrong input, described in full: the key, the value or values, and what to do instead.

    The command-line programs print the text on one rank, without a traceback, and exit with code 2.
    """
