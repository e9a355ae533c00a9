"""Makes `python -m onward` run the `onward` command, also if the folder of scripts is not on PATH."""

from onward.cli.main import main

if __name__ == "__main__":
    main()
