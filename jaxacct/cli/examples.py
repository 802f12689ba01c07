"""Examples that end the help of each command; a test reads all of them."""

EXAMPLES = {
    "jaxacct": """
jaxacct recommend --dataset-size 50k --batch-size 200 --iterations 1000 --epsilon 8 --delta 1e-5
jaxacct calibrate --dataset-size 50k --batch-size 200 --iterations 1000 --epsilon 8 --delta 1e-5 --out plan.json
jaxacct show plan.json
""",
    "jaxacct recommend": """
jaxacct recommend --dataset-size 50k --batch-size 200 --iterations 1000 --epsilon 8 --delta 1e-5
jaxacct recommend --dataset-size 50k --batch-size 200 --iterations 1000 --epsilon 8 --delta 1e-5 --bands 4
""",
    "jaxacct calibrate": """
jaxacct calibrate --dataset-size 50k --batch-size 200 --iterations 1000 --epsilon 8 --delta 1e-5 --out plan.json
jaxacct calibrate --dataset-size 50k --batch-size 200 --iterations 1000 --epsilon 8 --delta 1e-5 --bands 1
jaxacct calibrate --scheme poisson --sampling-probability 0.004 --iterations 5000 --noise-multiplier 1.1 --delta 1e-6
""",
    "jaxacct verify": """
jaxacct verify plan.json
jaxacct verify plan.json --replay
""",
    "jaxacct estimate": """
jaxacct estimate --scheme poisson --sampling-probability 0.004 --iterations 5000 --noise-multiplier 1.1 --delta 1e-6
jaxacct estimate --dataset-size 50k --batch-size 200 --iterations 1000 --bands 16 --noise-multiplier 0.6 --epsilon 8
""",
    "jaxacct strategy": """
jaxacct strategy --iterations 1000 --bands 16
jaxacct strategy --iterations 1000 --bands 16 --workload momentum:0.9 --out coefficients.txt
""",
    "jaxacct show": """
jaxacct show plan.json
jaxacct show plan.json --verbose
""",
    "jaxacct spent": """
jaxacct spent plan.json --step 500
jaxacct spent --event 1.1,0.01,1000 --event 0.9,0.01,500 --delta 1e-6
""",
    "jaxacct check": """
jaxacct check plan.json
jaxacct check plan.json --json
""",
    "jaxacct check-run": """
jaxacct check-run run/ plan.json
""",
    "jaxacct report": """
jaxacct report plan.json --out report.html
""",
    "jaxacct bench": """
jaxacct bench
""",
    "jaxacct train": """
jaxacct train --plan plan.json --data digits --out run/ --learning-rate 0.3
""",
    "jaxacct audit": """
jaxacct audit --plan plan.json --out audit.json
""",
    "jaxacct attribution": """
jaxacct attribution --edges edges.csv --dataset-size 60000 --examples-per-user 4 --batch-size 128 --min-separation 64 --out graph.npz
""",
    "jaxacct tradeoff": """
jaxacct tradeoff convert --epsilon 2 --delta 1e-5
jaxacct tradeoff general --dataset-size 50k --num-epochs 10 --num-microbatches 250 --epsilon 3 --delta 1e-5
""",
    "jaxacct tradeoff convert": """
jaxacct tradeoff convert --mu 1 --delta 1e-5
jaxacct tradeoff convert --epsilon 2 --delta 1e-5
""",
    "jaxacct tradeoff general": """
jaxacct tradeoff general --dataset-size 50k --num-epochs 10 --num-microbatches 250 --epsilon 3 --delta 1e-5
""",
    "jaxacct tradeoff last-iterate": """
jaxacct tradeoff last-iterate gd --num-examples 5000 --steps 200 --stepsize 0.1 --num-classes 10 --feature-norm 2 --strong-convexity 0.01 --delta 1e-5 --epsilon 3
""",
}
"""Command -> its examples, one a line."""
