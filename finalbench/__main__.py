"""`python -m finalbench` and the `finalbench` command: run the CLI, turn errors into exit codes."""

from __future__ import annotations

import sys


def main() -> None:
    """Exit with the code of the error that ended the command; 70 for a bug."""
    from finalbench.cli import app
    from finalbench.errors import FinalbenchError

    try:
        app()
    except FinalbenchError as error:
        sys.stderr.write(f"error: {error}\n")
        if error.hint:
            sys.stderr.write(f"\nhint: {error.hint}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away; there is nobody to tell.
        sys.stderr.close()
        sys.exit(0)
    except Exception:  # noqa: BLE001 - the last line of defence: a bug must not look like exit 1
        import traceback

        traceback.print_exc()
        sys.stderr.write("error: this is a bug in finalbench\n")
        sys.exit(70)


if __name__ == "__main__":
    main()
