"""``python -m stagepack``: the ``stagepack`` command."""

from stagepack.cli import main

if __name__ == "__main__":
    main()
