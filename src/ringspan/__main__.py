from ringspan.cli.main import main

raise SystemExit(main())
