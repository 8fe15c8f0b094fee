from suika.cli.app import main

main()
